"""A small network on scikit-learn's digits. It knows MLflow, and nothing of clusters."""

import argparse

import mlflow
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, required=True)
parser.add_argument("--epochs", type=int, required=True)
given = parser.parse_args()

images, digits = load_digits(return_X_y=True)
x_train, x_val, y_train, y_val = train_test_split(images / 16, digits, test_size=0.25, random_state=0)
network = MLPClassifier((32,), learning_rate_init=given.learning_rate, random_state=0)

with mlflow.start_run():
    for epoch in range(given.epochs):
        network.partial_fit(x_train, y_train, classes=range(10))
        accuracy = network.score(x_val, y_val)
        mlflow.log_metrics({"loss": network.loss_, "val_accuracy": accuracy}, step=epoch)
        print(f"epoch {epoch + 1} of {given.epochs}: loss {network.loss_:.3f}, val_accuracy {accuracy:.3f}", flush=True)
    mlflow.sklearn.log_model(network, name="digits", input_example=x_val[:1], serialization_format="cloudpickle")
