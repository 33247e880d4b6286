"""Updates from outside: captures and Flower."""
