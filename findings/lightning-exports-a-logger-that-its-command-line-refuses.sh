#!/usr/bin/env bash
# lightning 2.6.6 with jsonargparse 4.53.0 (torch 2.15.0, CPU); run on 2026-11-30.
#
# The package lightning.pytorch.loggers exports six loggers. Five are subclasses of lightning.pytorch.loggers.Logger, the
# type that Trainer declares for its argument. LitLogger, the one of Lightning's own platform, is a subclass of Fabric's
# Logger only. In Python, Trainer(logger=LitLogger(...)) is accepted, because nothing checks the type; but LightningCLI
# checks it, so the same class in a YAML file or as --trainer.logger is refused as "no subclass of Logger", although it
# comes from the module of that class and is listed beside the others. A script that works cannot become a configuration.
#
# Seen (name, subclass of Lightning's Logger, LightningCLI):
#   CSVLogger True accepted
#   CometLogger True accepted
#   LitLogger False refused
#   MLFlowLogger True accepted
#   TensorBoardLogger True accepted
#   WandbLogger True accepted
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lightning==2.6.6 torch==2.15.0 'jsonargparse[signatures]==4.53.0' numpy
cd "$folder"
cat > parse.py <<'PYTHON'
import contextlib
import io

from lightning.pytorch import loggers
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

refused = []
for name in sorted(name for name in loggers.__all__ if name != "Logger"):
    args, said = ["--trainer.logger", f"lightning.pytorch.loggers.{name}", "--print_config"], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        LightningCLI(BoringModel, run=False, save_config_callback=None, args=args)
    is_refused = "does not correspond to a subclass of Logger" in said.getvalue()
    refused += [name] if is_refused else []
    is_one = issubclass(getattr(loggers, name), loggers.Logger)
    print(name, is_one, "refused" if is_refused else "accepted")
if refused != ["LitLogger"]:
    raise SystemExit("LightningCLI behaves otherwise now")
print("unchanged")
PYTHON
venv/bin/python parse.py
