"""From a `Request` to a `Report`: load, measure, keep what is finished; it prints nothing."""
