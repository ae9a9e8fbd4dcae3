{{/* A Role in a namespace that does not exist fails when half of the release is made. `lookup` finds nothing where no
     server is asked (helm template): a namespace is missing only where `default`, which always exists, is found. */}}
{{- define "stage2.validateNamespaces" -}}
{{- range .Values.controller.namespaces -}}
{{- if and (not (lookup "v1" "Namespace" "" .)) (lookup "v1" "Namespace" "" "default") -}}
{{- fail (printf "controller.namespaces: there is no namespace %s; create it first, or take it out" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
