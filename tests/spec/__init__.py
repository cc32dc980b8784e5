"""What lit_fsdp promises, one file per promise, in the order of the README; on a real recipe and two processes."""
