"""Which buckets a rank has, planned without walking its parameters one by one."""
