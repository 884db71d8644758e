"""Other people's measurements, read into cost artifacts: one module for each project that published some."""
