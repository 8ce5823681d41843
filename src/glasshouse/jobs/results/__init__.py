"""What a run came to: outputs, logs, costs, cards, and forms that other tools read."""
