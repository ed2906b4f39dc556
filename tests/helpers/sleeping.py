"""Say so, and sleep until it is ended: `python -m tests.helpers.sleeping`."""

import signal

if __name__ == "__main__":
    print("asleep", flush=True)
    signal.pause()
