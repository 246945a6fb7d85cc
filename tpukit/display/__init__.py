"""What a notebook shows: tables, findings, bars and curves, figures. Imports no other room."""
