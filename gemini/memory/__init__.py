"""Memory: devices, pages, the spill file, chunks and their planes, and the manager that moves them within budgets."""
