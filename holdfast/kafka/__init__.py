"""Kafka: what source, sink and changelog share."""
