"""`python -m sim` is `servesim`."""

from sim.cli import end

if __name__ == "__main__":
    end()
