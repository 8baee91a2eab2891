"""GLUE scores against the share of heads that compare no tokens, and what that curve rests on."""
