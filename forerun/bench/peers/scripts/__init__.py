"""Scripts that run another engine for `forerun bench peers`, one process each, by the Python that
has that engine.

They are run by path and import nothing of forerun, which their Python may lack; they find each
other because a script's own directory is where Python looks first. So no file here may have the
name of a package."""
