"""Tables and plots of the documents, made from the results alone."""
