"""`python -m armillary`, for launchers that start modules: torchrun --nproc-per-node 2 -m armillary train WORKLOAD."""

from armillary.cli.main import main

if __name__ == "__main__":
    main()
