"""What looks at a recipe, a machine or a trained model: doctor, dry runs, benchmarks, export, saved models."""
