"""The command line in this process."""

from tests.cli.test_main import forerun  # noqa: F401
