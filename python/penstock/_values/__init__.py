"""Arguments, results and errors in transit between processes: checks, encodings, previews."""
