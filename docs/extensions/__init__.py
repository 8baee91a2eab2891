"""Extensions of Sphinx that the site needs."""
