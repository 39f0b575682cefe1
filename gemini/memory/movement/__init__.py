"""Movement: the manager, who gathers and evicts chunks, and what copies planes between tiers, ahead or on demand."""
