"""Movement: what copies planes between tiers, ahead of their use or when they are asked for."""
