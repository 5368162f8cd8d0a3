"""From a `Request` to a `Report`: load, measure, store finished parts; prints nothing."""
