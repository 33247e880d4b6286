"""What differs between images, sound and text."""
