"""The entry point of `python -m stage2_controller`."""

from stage2_api.pod.first_process import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()
    from stage2_controller.loop.main import main

    main()
