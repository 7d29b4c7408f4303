"""Other engines beside this one."""
