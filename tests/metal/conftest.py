"""What all tests of this folder share."""

from tests.collecting import _looked_at_once  # noqa: F401  a fixture for every file
