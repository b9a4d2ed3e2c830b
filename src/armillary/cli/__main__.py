"""`python -m armillary.cli`, for launchers that start modules: torchrun --nproc-per-node 2 -m armillary.cli train X."""

from armillary.cli.entry import main

if __name__ == "__main__":
    main()
