"""Which replica of a fleet a request goes to."""
