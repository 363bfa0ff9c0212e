"""What a user function touches: keyed state, its keys and its codecs."""
