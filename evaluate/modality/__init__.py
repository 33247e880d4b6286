"""The code that differs between images, sound and text."""
