"""States that outlive the process: two slots for every plane in a file with a name, and records that commit them."""
