"""How a teacher's attention is carried over."""
