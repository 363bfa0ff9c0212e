"""Doing it: the driver's protocol, the tasks, and Spark under them."""
