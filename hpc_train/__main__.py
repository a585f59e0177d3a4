"""`python -m hpc_train` is `hpc-train`."""

from hpc_train.cli import main

if __name__ == "__main__":
    main()
