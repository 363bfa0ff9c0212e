"""What to do: records, steps, sinks and the checks that need nothing to run."""
