"""servesim: a discrete-event simulator of LLM serving schedulers."""
