"""The wrap: what is asked for, which chunks it makes, and what cannot be managed."""
