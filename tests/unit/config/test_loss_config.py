"""What the ``model.loss`` section refuses."""

from __future__ import annotations

import pytest

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"z_loss": -1e-4}, "z_loss"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"backend": "liger", "label_smoothing": 0.1}, "label_smoothing"),
        ({"backend": "plain", "chunk_tokens": 64}, "chunk_tokens"),
    ],
)
def test_what_a_backend_cannot_do(options, field):
    with pytest.raises(ConfigError) as caught:
        LossConfig(**options)
    assert caught.value.field == field
