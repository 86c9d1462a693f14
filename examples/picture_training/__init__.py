"""What examples/train_images.py is made of: the pictures, the training, its checkpoints, the figures."""
