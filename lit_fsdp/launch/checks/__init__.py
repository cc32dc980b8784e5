"""What ``lit-fsdp doctor`` looks at, one file per subject: facts are gathered, then judged by a pure function."""
