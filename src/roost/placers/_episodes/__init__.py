"""Episodes in which the groups of a problem get devices one by one."""
