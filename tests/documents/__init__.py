"""Code, commands, links and tables of the documents."""
