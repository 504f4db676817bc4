"""Questions that clients answer, one module each, registered as `potluck.questions`."""
