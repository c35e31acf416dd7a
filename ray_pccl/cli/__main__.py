"""``python -m ray_pccl.cli``: the program ``ray-pccl``."""

from ray_pccl.cli import main

if __name__ == "__main__":
    main()
