"""What pretrained models keep when a part of their attention is synthesized."""
