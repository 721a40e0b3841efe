"""What AutoPipe measures: units, links, static layouts."""
