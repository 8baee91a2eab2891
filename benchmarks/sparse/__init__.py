"""Variants that choose their keys: what hashes find, how time grows, FlexAttention, patterns."""
