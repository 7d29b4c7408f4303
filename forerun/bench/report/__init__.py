"""What measurements look like on disk and on a page. It knows their fields alone: nothing of the
engine."""
