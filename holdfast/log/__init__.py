"""What makes state durable: storage, manifests, deltas and outboxes, and the way back from them.

Knows nothing of Spark, of sources or of user functions.
"""
