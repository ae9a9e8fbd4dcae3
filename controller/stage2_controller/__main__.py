"""The entry point of `python -m stage2_controller`."""

from stage2_controller.loop.main import main

if __name__ == "__main__":
    main()
