"""Arguments, results and errors on their way between processes: checks, encodings, previews."""
