"""Worker pools: environments in this process, in threads or in processes, all alike."""
