"""Large problems whose graphs are too wide for elimination: bounds by messages, choices by repair and local search."""
