"""``python -m fastdraft.cli``, the same as ``fastdraft``."""

from fastdraft.cli import main

if __name__ == "__main__":
    main()
